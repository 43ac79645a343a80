-- A group's own hash, and the fence.

local LEASED = PREFIX .. 'leased'
local function group_key(id) return PREFIX .. 'group:' .. id end

-- Fields of a group's hash; none if the key was overwritten with another type.
local function fields_of(id, ...)
  local fields = redis.pcall('HMGET', group_key(id), ...)
  if not fields.err then return fields end
  if string.sub(fields.err, 1, 9) ~= 'WRONGTYPE' then error(fields) end
  redis.call('UNLINK', group_key(id))
  return {}
end

-- The fence: whether this lease holds the group. A rollback invalidates all leases.
local function is_held(id, lease_token)
  if is_reconciling then return false end
  local held = fields_of(id, 'state', 'lease_token')
  return held[1] == 'leased' and held[2] == lease_token
end
