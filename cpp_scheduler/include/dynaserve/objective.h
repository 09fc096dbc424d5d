// What a placement costs: the one number, in milliseconds, by which the dynamic policy compares
// running a request whole with cutting it, here or there.  Pure.
//
// It adds up what this request waits, what the requests after it wait longer because of it, what
// prefill the fleet loses to its decode, and what it breaks.  Completion times do not enter: a
// hundred running decodes are a pipeline, not a queue, and levelling "work left" that includes them
// gains nothing (docs/placement.md).
#pragma once

#include <limits>

namespace dynaserve {

// infinity: no such objective.
struct Slo {
  double ttft_ms = std::numeric_limits<double>::infinity();
  double tbt_ms = std::numeric_limits<double>::infinity();

  bool operator==(const Slo&) const = default;
};

// What a placement is predicted to do.
struct Outcome {
  double ttft_ms = 0.0;          // from arrival to the first token
  double others_wait_ms = 0.0;   // that later requests wait longer, in sum
  double lost_prefill_ms = 0.0;  // of an instance that the fleet plan keeps free of decodes
  double hand_off_ms = 0.0;      // the price of a cut, beyond what it adds to the TTFT
  double gap_ms = 0.0;           // between two tokens of the answer, where a hand-off shows there
  double decode_step_ms = 0.0;   // of the decodes alone, where it will decode, with it
  double decode_tokens = 0.0;    // steps: of the answer all but the first, prefill's
  double overflow_tokens = 0.0;  // of KV beyond what the instance has, at the likely end
  double token_ms = 0.0;         // to compute one such token again
  double decodes_late_ms = 0.0;  // per step, that the decodes where it will decode are later
  // Of a cut inside the answer, the same of the tokens before it, where alpha decodes;
  // decode_tokens are those after it.
  double alpha_decode_step_ms = 0.0;
  double alpha_decode_tokens = 0.0;
  double alpha_decodes_late_ms = 0.0;

  bool operator==(const Outcome&) const = default;
};

// Work that joins an instance's queue: `work_ms` of prefill after `queue_ms` of it.  Every request
// that comes before the queue is empty again waits `work_ms` longer.
double OthersWaitMs(double queue_ms, double work_ms, double arrivals_per_ms);

// Every millisecond of TTFT over its SLO counts ten times; every token is late by what the step of
// its decodes exceeds the TBT SLO, and makes those of the instance's decodes late; a gap between
// tokens is a wait as that for the first one is, and counts ten times over the TBT SLO, too, or as
// often more as an answer has fewer than a hundred tokens, of which one may be late; memory that is
// not there is paid by computing its tokens again.
double ObjectiveMs(const Outcome& outcome, const Slo& slo);

}  // namespace dynaserve
