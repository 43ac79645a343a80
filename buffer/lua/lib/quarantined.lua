local QUARANTINED = PREFIX .. 'quarantined'

local function to_quarantine(id, reason, num_bytes)
  redis.call('ZADD', QUARANTINED, whole(now_ms()), id)
  redis.call('HSET', group_key(id), 'state', 'quarantined', 'lease_token', '', 'why', reason)
  count('bytes_quarantined', finite(num_bytes, 0))
  wake('room')
  audit({id}, 'quarantined', 'r', reason)
end

-- Quarantines a group whose hash is damaged and that is in no set, with what is left of it.
local function set_aside(id)
  local group = fields_of(id, 'bytes', 'tokens')
  if not (finite(group[1]) and finite(group[2])) then -- else the counters of held bytes would drift
    local payload = redis.pcall('STRLEN', key('payload:' .. id))
    local num_bytes = type(payload) == 'number' and payload or 0
    redis.call('HSET', group_key(id), 'bytes', num_bytes, 'tokens', '0')
    group[1] = num_bytes
  end
  to_quarantine(id, 'damaged', group[1])
end
