-- @include lib/audit
-- @include lib/group

local QUARANTINED = PREFIX .. 'quarantined'

local function to_quarantine(id, reason, num_bytes)
  redis.call('ZADD', QUARANTINED, whole(now_ms()), id)
  redis.call('HSET', group_key(id), 'state', 'quarantined', 'owner', '', 'why', reason)
  count('bytes_quarantined', finite(num_bytes, 0))
  wake('room')
  audit({id}, 'quarantined', 'r', reason)
end

-- A group whose hash was deleted or overwritten, and that no set holds at this moment: what is left of
-- it is kept for an operator to look at.
local function set_aside(id)
  local group = fields_of(id, 'bytes', 'tokens')
  if not (finite(group[1]) and finite(group[2])) then -- the counters of what is held must not drift
    local payload = redis.pcall('STRLEN', key('payload:' .. id))
    local num_bytes = type(payload) == 'number' and payload or 0
    redis.call('HSET', group_key(id), 'bytes', num_bytes, 'tokens', '0')
    group[1] = num_bytes
  end
  to_quarantine(id, 'damaged', group[1])
end
