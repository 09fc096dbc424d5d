// FleetState knows the instances and what each of them has promised to compute.
//
// Not thread-safe; the owner serialises calls.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "dynaserve/placement.h"
#include "dynaserve/types.h"

namespace dynaserve {

class FleetState {
 public:
  // Adds the instance, or replaces what was known about it.  Its reservations stay.
  void Observe(const InstanceState& instance);

  // Forgets the instance; unknown ids are ignored.  Requests placed on it stay reserved until
  // Release(), and count again if the instance is observed again.
  void Remove(const InstanceId& instance_id);

  // The instances that accept new work, in order of id.
  std::vector<InstanceLoad> Accepting() const;

  // Reserves the tokens of both micro-requests.  Requires !IsReserved(request_id) and instances
  // that Accepting() returned.
  void Reserve(const std::string& request_id, const Placement& placement);

  // A request that was whole is cut: what it reserved beyond the token is reserved on beta; of an
  // answer that has outgrown its reservation, nothing.  What is not known, or cut, is ignored.
  void Split(const std::string& request_id, const InstanceId& beta, std::int64_t split_token);

  // Returns what Reserve() took; unknown ids are ignored.
  void Release(const std::string& request_id);

  bool IsReserved(const std::string& request_id) const;

  // What others have reserved on the instance, by its own word: it counts until it is set anew, or
  // the instance is removed.  Unknown ids are ignored.
  void SetOthers(const InstanceId& instance_id, std::int64_t tokens);

  // Tokens promised by the instance, to others too; 0 for unknown ids.
  std::int64_t ReservedTokens(const InstanceId& instance_id) const;

  // Throws std::logic_error if the instances' sums differ from the requests' reservations, or an
  // absent instance without reservations is kept.
  void CheckInvariants() const;

 private:
  struct Instance {
    bool present = false;  // false: removed, kept for its reservations
    bool accepts_new = false;
    bool whole_only = false;
    std::int64_t reserved_tokens = 0;
    std::int64_t others_tokens = 0;
    std::int64_t num_reservations = 0;
    std::uint64_t last_reserved = 0;
  };
  struct Reservation {
    InstanceId instance_id;
    std::int64_t tokens = 0;
  };

  void Take(const std::string& request_id, const MicroRequest& part);
  void EraseIfUnused(const InstanceId& instance_id);

  std::map<InstanceId, Instance> instances_;
  std::unordered_map<std::string, std::vector<Reservation>> reservations_;
  std::uint64_t num_taken_ = 0;
};

}  // namespace dynaserve
