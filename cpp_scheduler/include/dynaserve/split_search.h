// The choice for one request: whole on which instance, or cut where between which two.
//
// Closed forms of the objective shortlist the candidates, at most kMostProbes charts of pairs and
// exact predictions of cuts, and kWholeProbes of whole runs, decide.  Nothing is reserved.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "dynaserve/execution_predictor.h"
#include "dynaserve/objective.h"

namespace dynaserve {

inline constexpr int kMostProbes = 6;
inline constexpr int kWholeProbes = 3;

// One instance that accepts new work.
struct SearchInstance {
  ExecutionPredictor* predictor = nullptr;
  bool keeps_free = false;           // of decodes, by the fleet plan
  std::int64_t cached_tokens = 0;    // of this prompt, in its prefix cache
  std::int64_t promised_tokens = 0;  // KV of its requests at their likely ends
  std::optional<std::uint64_t> own_key =
      std::nullopt;         // of this request, where it is on the timeline already,
  std::int64_t behind = 0;  // and how many are behind it there
};

struct SearchRequest {
  std::int64_t prompt_tokens = 0;
  std::int64_t expected_output_tokens = 1;  // for work
  std::int64_t likely_output_tokens = 1;    // for memory: an upper quantile
  bool may_cut = true;
  Slo slo;
};

// What the search knows beside the instances.
struct SearchOptions {
  double hand_off_ms = 5.0;            // from alpha's last token to beta's readiness, at the least
  double kv_token_ms = 0.0;            // to move the KV of a token (KvThereMs),
  double kv_token_work_ms = 0.0;       // and what it takes of either instance's steps
  double hand_off_price_ms = 20.0;     // what a cut has to gain, and this share of its TTFT:
  double hand_off_price_share = 0.05;  // predictions err
  std::int64_t least_part_tokens = 16;
  std::int64_t least_cut_prompt_tokens = 32;  // shorter: before the last one only
  double arrivals_per_ms = 0.0;               // per instance
  double lost_share = 0.0;                    // FleetPlan::lost_share
  double prefill_pressure = 0.0;     // share of its time that the fleet prefills, in [0, 1]
  double mean_context_tokens = 0.0;  // of a decode of the fleet
  // By the table, of the decodes of an instance alone, were the fleet's spread evenly: where
  // nothing is gathered, they are kept level.  infinity: not so.
  double level_step_ms = std::numeric_limits<double>::infinity();

  // What a hand-off of so many tokens takes of either instance's steps.
  double MovingMs(std::int64_t tokens) const {
    return kv_token_work_ms * static_cast<double>(tokens);
  }
};

// A candidate that was predicted exactly.
struct Tried {
  std::size_t alpha = 0;
  std::optional<std::size_t> beta;
  std::int64_t split_token = 0;
  double ttft_ms = 0.0;
  double objective_ms = 0.0;

  bool operator==(const Tried&) const = default;
};

// alpha computes [0, split_token) on instances[alpha], beta the rest on instances[beta]; whole
// without beta.
struct Choice {
  std::size_t alpha = 0;
  std::optional<std::size_t> beta;
  std::int64_t split_token = 0;
  Outcome outcome;
  double objective_ms = 0.0;
  double whole_objective_ms = 0.0;  // of the best whole run that was tried
  double alpha_start_ms = 0.0;      // absolute time at which alpha starts,
  double hand_off_ms = 0.0;         // at which beta is ready,
  double beta_start_ms = 0.0;       // and at which it starts
  int probes = 0;

  bool operator==(const Choice&) const = default;
};

class SplitSearch {
 public:
  SplitSearch();
  ~SplitSearch();
  SplitSearch(SplitSearch&&) noexcept;

  // `instances` must not be empty; their predictors learn that time has come to now_ms.
  Choice Find(std::span<const SearchInstance> instances, const SearchRequest& request,
              const SearchOptions& options, double now_ms);

  // What the last Find() predicted exactly, in that order.
  std::span<const Tried> tried() const { return tried_; }

  // When beta has the KV of so many tokens of alpha.  It leaves step by step: that of the last
  // step, once it is over, which of a prompt in one step is all.  leaves_ms: at the earliest, which
  // is the end of the first step; drafts, which do not know it, begin with the step.
  static double KvThereMs(double leaves_ms, double end_ms, double tokens, double last_tokens,
                          double kv_token_ms) {
    return std::max(leaves_ms + kv_token_ms * tokens, end_ms + kv_token_ms * last_tokens);
  }
  static double KvThereMs(const Forecast& alpha, std::int64_t tokens, double kv_token_ms) {
    const bool in_answer = alpha.end_ms > alpha.prefill_end_ms;
    const std::int64_t last = in_answer ? 1 : alpha.last_prefill_tokens;
    const bool prefills = std::isfinite(alpha.first_prefill_end_ms);
    const double leaves_ms = prefills ? alpha.first_prefill_end_ms : alpha.start_ms;
    return KvThereMs(leaves_ms, alpha.end_ms, static_cast<double>(tokens),
                     static_cast<double>(last), kv_token_ms);
  }

  // Exact predictions of one candidate: Find() decides by them, and the oracle of the tests tries
  // every cut.  split_token: in [1, end), where `end` tokens are computed in all; from
  // prompt_tokens on alpha gives the first token.
  Choice TryWhole(std::span<const SearchInstance> instances, std::size_t index,
                  const SearchRequest& request, const SearchOptions& options, double now_ms);
  Choice TryCut(std::span<const SearchInstance> instances, std::size_t alpha, std::size_t beta,
                std::int64_t split_token, const SearchRequest& request,
                const SearchOptions& options, double now_ms);

  // What decoding the request's answer on that instance costs, whatever computes its prompt.
  Outcome PriceDecoding(const SearchInstance& instance, const SearchRequest& request,
                        const SearchOptions& options, double now_ms);

 private:
  struct Sketch;
  struct Prefilling;
  struct PairChart;
  // A cut as a chart of its pair's steps tells it.
  struct Draft {
    double objective_ms;
    Sketch* alpha;
    Sketch* beta;
    std::int64_t split_token;
    bool is_probed;
  };
  struct PairGuess {
    double objective_ms = std::numeric_limits<double>::infinity();
    Sketch* alpha = nullptr;
    Sketch* beta = nullptr;
    std::int64_t split_token = 0;
  };
  struct CutTimes {
    double alpha_queue_ms, alpha_ms, beta_work_ms, moving_ms, ttft_ms;
  };
  struct Ranked {
    double queue_ms;
    double rank_ms;
    std::size_t index;
  };

  static double CachedTokenMs(std::span<const SearchInstance> instances,
                              const SearchRequest& request);
  void SketchAll(std::span<const SearchInstance> instances, const SearchRequest& request,
                 const SearchOptions& options, double now_ms);
  Outcome Priced(const Sketch& decoding, const SearchRequest& request,
                 const SearchOptions& options) const;
  // On an instance that is kept free, of so many tokens of an answer.
  static double LostPrefillMs(const Sketch& decoding, double decode_tokens,
                              const SearchOptions& options);
  static Outcome PricedInAnswer(const Sketch& alpha, const Sketch& beta, std::int64_t split_token,
                                const SearchRequest& request, const SearchOptions& options);
  double GuessInAnswer(const Sketch& alpha, const Sketch& beta, std::int64_t split_token,
                       const SearchRequest& request, const SearchOptions& options) const;
  void DraftInAnswer(Sketch& alpha, Sketch& beta, const SearchRequest& request,
                     const SearchOptions& options);
  bool WasTried(const Draft& draft) const;
  void TryInAnswer(std::span<const SearchInstance> instances, const SearchRequest& request,
                   const SearchOptions& options, double now_ms, Choice& best, int& probes);
  double GuessWhole(const Sketch& sketch, const SearchRequest& request,
                    const SearchOptions& options) const;
  double GuessCut(const Sketch& alpha, const Sketch& beta, std::int64_t split_token,
                  const SearchRequest& request, const SearchOptions& options) const;
  double PriceCut(const CutTimes& times, const Sketch& beta, const SearchRequest& request,
                  const SearchOptions& options) const;
  void Chart(std::span<const SearchInstance> instances, Sketch& alpha, Sketch& beta,
             std::int64_t split_token, const SearchRequest& request, const SearchOptions& options,
             double now_ms);
  template <typename Drafted>
  static void DraftAlphaSteps(const PairChart& chart, Drafted draft);
  void ChartPairs(std::span<const SearchInstance> instances, const SearchRequest& request,
                  const SearchOptions& options, double now_ms, double best_ms, int& probes);
  PairGuess GuessPair(Sketch& alpha, Sketch& beta, const SearchRequest& request,
                      const SearchOptions& options) const;
  std::array<std::int64_t, 5> CutsWorthTrying(const Sketch& alpha, const Sketch& beta,
                                              const SearchRequest& request,
                                              const SearchOptions& options) const;
  Choice ExactWhole(std::span<const SearchInstance> instances, std::size_t index,
                    const Sketch& sketch, const SearchRequest& request,
                    const SearchOptions& options, double now_ms) const;
  Choice ExactCut(std::span<const SearchInstance> instances, const Sketch& prefilling,
                  const Sketch& decoding, std::size_t alpha, std::size_t beta,
                  std::int64_t split_token, const SearchRequest& request,
                  const SearchOptions& options, double now_ms) const;
  Choice BestWhole(std::span<const SearchInstance> instances, const SearchRequest& request,
                   const SearchOptions& options, double now_ms);
  void Refine(std::span<const SearchInstance> instances, const SearchRequest& request,
              const SearchOptions& options, double now_ms, Choice& best, int& probes);
  void Note(const Choice& tried);

  // Kept for their memory.
  std::vector<Ranked> ranked_;
  std::vector<Sketch> sketches_;
  std::vector<Tried> tried_;
  std::vector<Draft> drafts_;
  std::vector<PrefillStep> alpha_steps_, beta_steps_;
};

}  // namespace dynaserve
