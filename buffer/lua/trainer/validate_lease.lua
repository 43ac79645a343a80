-- The last check before a step: which groups of a lease may still be trained. Renews their deadline.
-- ARGV: version, lease token, lease in ms, version below which tokens were masked ('' for none), ids...
-- Reply: the ids that stay.
-- @include lib/drop
-- @include lib/group
-- @include lib/leash
-- @include lib/masking
-- @include lib/quarantined
-- @include lib/ready
-- @include lib/return
local version, lease_token, masked_below = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[4])
local deadline, oldest = whole(now_ms() + tonumber(ARGV[3])), oldest_fresh(version)
local fresh, deadlines, stale = {}, {}, {}

for i = 5, is_reconciling and 0 or #ARGV do
  local id = ARGV[i]
  local group = fields_of(id, 'state', 'owner', 'min_version', 'max_version', 'versions')
  if group[1] == 'leased' and group[2] == lease_token then
    local gate = gate_of(group[3], group[4])
    if not gate then
      redis.call('ZREM', LEASED, id)
      set_aside(id)
    elseif gate < oldest then
      stale[#stale + 1] = id
    elseif oldest_trained(group[3], group[5], 0, masked_below) < oldest then
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
