-- Leases those of the given groups that are ready and fresh.
-- ARGV: version, lease token, lease in ms, step, cost of a pair of tokens, group ids...
-- Reply: {{ids}, {costs}, deadline ms, mask below, {id, versions...}}
-- @include lib/group
-- @include lib/leash
-- @include lib/take
local version, lease_token, pair_cost, ids = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[5]), {}
local cutoff = oldest_fresh(version) * SEQ_RANGE
for i = 6, #ARGV do
  local score = not is_reconciling and redis.call('ZSCORE', READY, ARGV[i])
  -- Groups taken with this token before are returned again: a reply may have been lost.
  if score and tonumber(score) >= cutoff then ids[#ids + 1] = ARGV[i] end
end
local deadline = whole(now_ms() + tonumber(ARGV[3]))
if #ids > 0 then
  local groups, fields = whole_groups(ids)
  if #groups > 0 then take(groups, fields, lease_token, deadline, ARGV[4], pair_cost) end
end
local costs, moved = {}, {}
ids = {}
for i = 6, #ARGV do
  local group = fields_of(ARGV[i], 'state', 'owner', 'tokens', 'moved', 'versions', 'pairs')
  if group[1] == 'leased' and group[2] == lease_token then
    ids[#ids + 1], costs[#costs + 1] = ARGV[i], cost_of(group[3], group[6], pair_cost)
    if group[4] then
      moved[#moved + 1] = ARGV[i]
      moved[#moved + 1] = group[5] or ''
    end
  end
end
return {ids, costs, deadline, mask_below(version), moved}
