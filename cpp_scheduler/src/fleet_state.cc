#include "dynaserve/fleet_state.h"

#include <algorithm>
#include <stdexcept>

namespace dynaserve {

void FleetState::Observe(const InstanceState& instance) {
  Instance& known = instances_[instance.instance_id];
  known.present = true;
  known.accepts_new = instance.accepts_new;
  known.whole_only = instance.whole_only;
}

void FleetState::Remove(const InstanceId& instance_id) {
  const auto found = instances_.find(instance_id);
  if (found == instances_.end()) return;
  found->second.present = false;
  found->second.accepts_new = false;
  found->second.last_reserved = 0;
  found->second.others_tokens = 0;
  EraseIfUnused(instance_id);
}

std::vector<InstanceLoad> FleetState::Accepting() const {
  std::vector<InstanceLoad> loads;
  loads.reserve(instances_.size());
  for (const auto& [id, instance] : instances_) {
    if (!instance.accepts_new) continue;
    const std::int64_t tokens = instance.reserved_tokens + instance.others_tokens;
    loads.push_back({id, tokens, instance.last_reserved, instance.whole_only});
  }
  return loads;
}

void FleetState::Reserve(const std::string& request_id, const Placement& placement) {
  Take(request_id, placement.alpha);
  if (placement.beta) Take(request_id, *placement.beta);
}

void FleetState::Release(const std::string& request_id) {
  const auto found = reservations_.find(request_id);
  if (found == reservations_.end()) return;
  for (const Reservation& reservation : found->second) {
    Instance& instance = instances_.at(reservation.instance_id);
    instance.reserved_tokens -= reservation.tokens;
    instance.num_reservations -= 1;
    EraseIfUnused(reservation.instance_id);
  }
  reservations_.erase(found);
}

void FleetState::Split(const std::string& request_id, const InstanceId& beta,
                       std::int64_t split_token) {
  const auto found = reservations_.find(request_id);
  const auto to = instances_.find(beta);
  if (found == reservations_.end() || found->second.size() != 1) return;
  if (to == instances_.end() || !to->second.present) return;
  Reservation& alpha = found->second.front();
  if (alpha.instance_id == beta) return;
  const std::int64_t moved = std::max<std::int64_t>(0, alpha.tokens - split_token);
  alpha.tokens -= moved;
  instances_.at(alpha.instance_id).reserved_tokens -= moved;
  found->second.push_back({beta, moved});
  to->second.reserved_tokens += moved;
  to->second.num_reservations += 1;
  to->second.last_reserved = ++num_taken_;
}

bool FleetState::IsReserved(const std::string& request_id) const {
  return reservations_.contains(request_id);
}

void FleetState::SetOthers(const InstanceId& instance_id, std::int64_t tokens) {
  const auto found = instances_.find(instance_id);
  if (found != instances_.end() && found->second.present) found->second.others_tokens = tokens;
}

std::int64_t FleetState::ReservedTokens(const InstanceId& instance_id) const {
  const auto found = instances_.find(instance_id);
  if (found == instances_.end()) return 0;
  return found->second.reserved_tokens + found->second.others_tokens;
}

void FleetState::CheckInvariants() const {
  std::map<InstanceId, Instance> sums;
  for (const auto& [request_id, parts] : reservations_) {
    for (const Reservation& part : parts) {
      if (part.tokens < 0) {
        throw std::logic_error("request \"" + request_id + "\" reserves " +
                               std::to_string(part.tokens) + " tokens");
      }
      sums[part.instance_id].reserved_tokens += part.tokens;
      sums[part.instance_id].num_reservations += 1;
    }
  }
  for (const auto& [id, instance] : instances_) {
    const Instance sum = sums[id];
    if (instance.reserved_tokens != sum.reserved_tokens ||
        instance.num_reservations != sum.num_reservations) {
      throw std::logic_error(
          "instance \"" + id + "\" counts " + std::to_string(instance.reserved_tokens) +
          " reserved tokens, its requests hold " + std::to_string(sum.reserved_tokens));
    }
    if (!instance.present && instance.num_reservations == 0) {
      throw std::logic_error("instance \"" + id + "\" is removed and idle, but still kept");
    }
  }
  if (sums.size() != instances_.size()) {
    throw std::logic_error("requests hold reservations on instances that are not known");
  }
}

void FleetState::Take(const std::string& request_id, const MicroRequest& part) {
  Instance& instance = instances_.at(part.instance_id);
  reservations_[request_id].push_back({part.instance_id, part.tokens()});
  instance.reserved_tokens += part.tokens();
  instance.num_reservations += 1;
  instance.last_reserved = ++num_taken_;
}

void FleetState::EraseIfUnused(const InstanceId& instance_id) {
  const auto found = instances_.find(instance_id);
  if (!found->second.present && found->second.num_reservations == 0) instances_.erase(found);
}

}  // namespace dynaserve
