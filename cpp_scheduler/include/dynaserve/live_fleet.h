// LiveFleet predicts what every instance of a fleet is going to run, and places requests by it:
// the policies kDynamic (split_search.h under the plan of fleet_planner.h), kExhaustive and kPaper.
//
// A placed request stays on the timelines of its instances until Finish(): what is predicted to be
// over, and is not, is put back by the next Report().  Time never goes back; an earlier one counts
// as the latest that was seen.  Not thread-safe.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "dynaserve/arrival_rates.h"
#include "dynaserve/execution_predictor.h"
#include "dynaserve/fleet_planner.h"
#include "dynaserve/hand_off_revision.h"
#include "dynaserve/length_bias.h"
#include "dynaserve/placement.h"
#include "dynaserve/split_search.h"
#include "dynaserve/types.h"

namespace dynaserve {

class LiveFleet {
 public:
  static constexpr double kLookEveryMs = 200.0;
  static constexpr int kMostRevisions = 3;
  static constexpr int kMostLooks = 4;
  static constexpr std::int64_t kSoonSteps = 4;
  static constexpr double kRecentMs = 10'000.0;
  static constexpr double kLastingMs = 60'000.0;

  LiveFleet(const Options& options, const ProfileTable& table);

  // Adds the instance, or replaces its limits.  Throws std::invalid_argument as
  // Validate(InstanceLimits) does.
  void Observe(const InstanceState& instance);
  void Remove(const InstanceId& instance_id);

  // Predicts by this table from now on.  Of what steps cost on each instance beside it, the part
  // that all have in common is taken to be in the table.
  void Learn(const ProfileTable& table, double now_ms);

  // What it takes to move the KV of a token, as transfers told.
  void SetKvTokenMs(double kv_token_ms, double work_ms) {
    options_.kv_token_ms = kv_token_ms;
    options_.kv_token_work_ms = work_ms;
  }

  // What comes lately to this front-end, cut by hand or not, is what plans and prices go by: with
  // as many output tokens as answers turn out to have for each that is expected.
  void CountArrival(const RequestSpec& request, double now_ms);

  // Chooses among `accepting`, which Observe() has seen and which is not empty; enters nothing.
  Placement Choose(const RequestSpec& request, std::span<const InstanceLoad> accepting,
                   double now_ms);

  // Puts a placed request on the timelines of its instances, if they are (still) there.
  void Enter(const RequestSpec& request, const Placement& placement, double now_ms);

  // An answer has ended by itself or at its limit, of which so many would be expected now.
  void LearnLength(std::int64_t output_tokens, std::int64_t expected_tokens) {
    bias_.Learn(output_tokens, expected_tokens);
  }

  // Takes it off; unknown ids are ignored.
  void Finish(const std::string& request_id, double now_ms);

  // When the request would end, as it is expected to go on: its decodes share their time with the
  // prompts of those who come meanwhile, as those of its instance did lately, and by and by others
  // decode beside it than now, as many as did lately.  nullopt: it is not there, or should have
  // ended.
  std::optional<double> PredictEndMs(const std::string& request_id, double now_ms);

  // When its alpha would reach the cut, as its instance is now; now, if it should have. nullopt: it
  // is not there, or not cut.
  std::optional<double> PredictHandOffMs(const std::string& request_id, double now_ms);

  // Replaces, for these requests, predicted by actual progress on the instance.  Ids that are not
  // there are ignored.  An alpha beyond its cut stops with its step; a beta whose alpha is not
  // there yet has not begun, whatever was predicted.  The instance is between two steps now.  What
  // has not begun waits, before what comes later: what was predicted to have begun in the order of
  // `progress`, before what was predicted to wait.  Of betas, which may wait for their KV, this
  // says nothing.
  void Report(const InstanceId& instance_id, std::span<const Progress> progress, double now_ms);

  // Replaces what others have on the instance.  One that is past its end has nothing more to run,
  // and holds its memory still.
  void ReportOthers(const InstanceId& instance_id, std::span<const OtherRequest> others,
                    double now_ms);

  // Whether the hand-off of a request that kDynamic cut should change (hand_off_revision.h), and
  // enters the change.  Asked again within kLookEveryMs, or after kMostRevisions changes, the
  // answer is nullopt.  A look at a long queue is dear: of an alpha instance, kMostLooks requests
  // are looked at within that time, each once before any is looked at again, and none before all
  // prefill ahead of it fits into kSoonSteps full steps: until its turn comes, much may change.
  // Also whether a request that kDynamic placed whole should be cut, once, that decodes where the
  // plan keeps free of decodes (late_cut.h): of an instance one after the other, as their KV leaves
  // over the same link, and no more of them are looked at within that time.
  std::optional<Revision> Revise(const std::string& request_id, double now_ms);

  // Somebody else has moved the hand-off, or lifted it (nullopt): it is theirs from now on, and not
  // revised.  Requests without a beta are ignored.
  void Recut(const std::string& request_id, std::optional<std::int64_t> split_token, double now_ms);

  // Somebody else cuts a request that runs whole, which is theirs from now on.  Others are ignored,
  // and so are betas that are unknown or run it already.
  void CutWhole(const std::string& request_id, const InstanceId& beta, std::int64_t split_token,
                double now_ms);

  // alpha stands, with this many tokens computed: beta goes on from there.
  void Parked(const std::string& request_id, std::int64_t computed_tokens, double now_ms);

  // Moves the instance's cost scale towards what a step took; unknown instances are ignored.
  // Throws std::invalid_argument for a step without tokens or a time that is not positive.
  void ObserveStep(const InstanceId& instance_id, const BatchShape& shape, double measured_ms,
                   double now_ms);

  // 1 for unknown instances.
  double CostScale(const InstanceId& instance_id) const;

  // Throws std::logic_error if promised memory is not the sum of what requests were promised.
  void CheckInvariants() const;

 private:
  struct Looks {
    double round_ms = 0.0;  // since then, each is looked at once
    double since_ms = 0.0;
    int count = 0;  // since then
  };
  struct Instance {
    std::unique_ptr<ExecutionPredictor> predictor;
    InstanceLimits limits;
    bool accepts_new = true;
    bool gathers = false;
    double cuts_late_until_ms = 0.0;  // the last request that was cut late here is handed over then
    Looks looks;                      // at its hand-offs,
    Looks late_looks;                 // and at what decodes there whole
    std::int64_t promised_tokens = 0;  // others' included
    std::int64_t others_promised = 0;
    double log_scale = 0.0;
    bool has_told_steps = false;
    // Of the last minute, of steps with decodes, faded until told_ms: their number, what they
    // took, and what of that the prefill beside the decodes took.
    double told_ms = 0.0;
    double lasting_steps = 0.0;
    double lasting_step_ms = 0.0;
    double lasting_prefill_ms = 0.0;
  };
  struct Part {
    InstanceId instance_id;
    std::int64_t promised_tokens = 0;
  };
  struct Entry {
    std::uint64_t ordinal = 0;
    std::int64_t prompt_tokens = 0;
    std::int64_t split_token = 0;
    std::int64_t cached_tokens = 0;    // of the prompt, where its first part runs
    std::int64_t promised_tokens = 0;  // for all of it, when it was entered
    std::vector<Part> parts;           // alpha, beta
    SearchRequest request;
    double arrived_ms = 0.0;
    double looked_ms = 0.0;
    int revisions_left = 0;     // of a hand-off that is nobody else's
    bool may_cut_late = false;  // it was placed whole, by nobody's wish
  };

  struct Member {
    Instance* instance = nullptr;
    std::int64_t decodes = 0;  // once its queue is over
  };
  // Of the instances that accept requests; decodes are those that run once the queues are over.
  struct Census {
    std::vector<Member> members;
    InstanceLimits limits;  // what each of them is up to
    std::int64_t decodes = 0;
    std::int64_t context_tokens = 0;  // of these decodes
    std::int64_t answers = 0;         // that run now or are going to
    double cost_scale = 0.0;          // the mean
    double gathering_cost = 1.0;      // FleetDemand has it
  };

  // live_fleet.cc
  double At(double now_ms);
  void Install(Instance& instance, std::unique_ptr<ExecutionPredictor> predictor);
  void EnterPart(Entry& entry, std::size_t side, const InstanceId& instance_id,
                 const VirtualRequest& request, std::int64_t promised_tokens, double now_ms);

  // live_plan.cc
  bool IsPlanDue(std::size_t accepting, double now_ms) const;
  void Plan(std::span<const InstanceLoad> accepting, double now_ms);
  Census TakeCensus(std::span<const InstanceLoad> accepting, double now_ms);
  void Smooth(const Census& census, double now_ms);
  FleetDemand DemandOf(const Census& census, double now_ms) const;
  void LetGather(Census& census);
  double EvenStepMs() const;
  Placement ChooseDynamic(const RequestSpec& request, std::span<const InstanceLoad> accepting,
                          double now_ms);
  Placement ChoosePaper(const RequestSpec& request, std::span<const InstanceLoad> accepting,
                        double now_ms);
  SearchOptions Circumstances(std::size_t instances, double now_ms) const;
  SearchInstance Seen(Instance& instance, std::int64_t own_promise = 0) const;
  bool GathererHasRoom(std::int64_t prompt_tokens, double now_ms);
  bool HasRoom(Instance& gatherer, std::int64_t prompt_tokens, double now_ms);
  double AtMeanAgeMs(const Instance& instance, std::int64_t decodes) const;

  // live_progress.cc
  void SendBack(const Entry& entry, double now_ms);
  void GoOn(Entry& entry, std::size_t side, const Progress& report, Instance& instance,
            double now_ms);
  void CountStep(Instance& instance, const BatchShape& shape, double measured_ms, double now_ms);
  // Of a decode that would take known_ms, if nobody else came.
  double DecodingMs(const Instance& instance, double known_ms, std::int64_t tokens,
                    double now_ms) const;
  double ReadyMs(const Forecast& alpha, std::int64_t tokens, double now_ms) const;
  void HoldBeta(const Entry& entry, double now_ms);

  // live_revision.cc
  std::optional<Revision> ReviseWhole(Entry& entry, double now_ms);
  void AddBeta(Entry& entry, const InstanceId& beta);
  Instance* RoomiestGatherer(std::int64_t context_tokens, double now_ms, InstanceId& instance_id);
  static bool MayLook(Looks& looks, const Entry& entry, double now_ms);
  void StayOnAlpha(Entry& entry, double now_ms);
  void Lift(Entry& entry, double now_ms);
  void CutAt(Entry& entry, std::int64_t split_token, double ready_ms, double now_ms);
  double ParkedReadyMs(const Entry& entry, std::int64_t computed_tokens, double now_ms);
  double CutReadyMs(const Entry& entry, std::int64_t split_token,
                    std::optional<std::int64_t> left_tokens, double now_ms);
  static VirtualRequest BetaOf(const Entry& entry);  // as it is when it begins
  void Put(const InstanceId& instance_id, const VirtualRequest& request, double now_ms);

  Options options_;                            // but for kv_token_ms constant after construction
  std::unique_ptr<const ProfileTable> table_;  // predictors refer to it

  std::map<InstanceId, Instance> instances_;
  std::unordered_map<std::string, Entry> entries_;
  std::uint64_t num_entered_ = 0;
  std::uint64_t num_pairs_ = 0;  // kPaper's round robin
  double now_ms_ = 0.0;

  FleetPlan plan_;
  static constexpr double kNeverPlanned = -1e300;
  double planned_ms_ = kNeverPlanned;
  double smoothed_ms_ = kNeverPlanned;
  std::size_t planned_instances_ = 0;
  double smoothed_decodes_ = 0.0;     // that run once the queues are over,
  double smoothed_answers_ = 0.0;     // and that run now or are going to
  double mean_context_tokens_ = 0.0;  // of a decode, when it was planned
  double level_step_ms_ = std::numeric_limits<double>::infinity();  // SearchOptions has it

  // Prices go by what comes now, plans by what lasts.
  ArrivalRates recent_{kRecentMs};
  ArrivalRates lasting_{kLastingMs};
  LengthBias bias_;

  // Kept for their memory.
  SplitSearch search_;
  std::vector<SearchInstance> candidates_;
  std::vector<VirtualRequest> running_;
  std::vector<VirtualRequest> waiting_;
  std::vector<VirtualRequest> sent_back_;
  std::vector<const Entry*> under_way_;
  std::unordered_set<std::uint64_t> waits_;
  std::unordered_set<std::uint64_t> told_;
};

}  // namespace dynaserve
