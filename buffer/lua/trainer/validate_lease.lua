-- The last check before a step: which groups of a lease may still be trained. Renews their deadline.
-- Request: version, lease_token, lease_ms, mask_below_version (below it tokens were masked; or none),
--          group_ids.
-- Reply: the ids that stay.
local deadline, oldest = whole(now_ms() + request.lease_ms), oldest_fresh(request.version)
local fresh, deadlines, stale = {}, {}, {}

for _, id in ipairs(is_reconciling and {} or request.group_ids) do
  local group = fields_of(id, 'state', 'lease_token', 'min_version', 'max_version', 'versions')
  if group[1] == 'leased' and group[2] == request.lease_token then
    local gate = gate_of(group[3], group[4])
    if not gate then
      redis.call('ZREM', LEASED, id)
      set_aside(id)
    elseif gate < oldest then
      stale[#stale + 1] = id
    elseif oldest_trained(group[3], group[5], 0, request.mask_below_version) < oldest then
      -- More of its tokens must be masked now than the trainer has masked.
      redis.call('ZREM', LEASED, id)
      to_ready(id, 'requeued', 'r', 'mask')
      wake('room')
    else
      fresh[#fresh + 1] = id
      deadlines[#deadlines + 1] = deadline
      deadlines[#deadlines + 1] = id
    end
  end
end
call_many('ZREM', LEASED, stale)
drop(stale, 'stale')
if #fresh > 0 then call_many('ZADD', LEASED, deadlines) end
return fresh
