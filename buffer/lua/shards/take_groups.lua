-- Leases those of the given groups that are ready and fresh.
-- Request: lease, lease_token, lease_ms, group_ids.
-- Reply: Taken: {ids}, {costs}, mask below, {{id, {version...}}, ...}
local version, lease_token, ids = request.lease.version, request.lease_token, {}
local cutoff = oldest_fresh(version) * SEQ_RANGE
for _, id in ipairs(request.group_ids) do
  local score = not is_reconciling and redis.call('ZSCORE', READY, id)
  -- Groups taken with this token before are returned again: a reply may have been lost.
  if score and tonumber(score) >= cutoff then ids[#ids + 1] = id end
end
local groups, fields = whole_groups(ids)
if #groups > 0 then take(groups, fields, lease_token, whole(now_ms() + request.lease_ms), request.lease) end
local costs, renumbered = {}, {}
ids = {}
for _, id in ipairs(request.group_ids) do
  local group = fields_of(id, 'state', 'lease_token', 'tokens', 'renumbered', 'versions', 'pairs')
  if group[1] == 'leased' and group[2] == lease_token then
    ids[#ids + 1], costs[#costs + 1] = id, cost_of(group[3], group[6], request.lease.pair_cost)
    if group[4] then add_renumbered(renumbered, id, group[5]) end
  end
end
return {ids, costs, mask_below(version), renumbered}
