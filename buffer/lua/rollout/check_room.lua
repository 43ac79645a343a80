-- Whether a push of so many bytes would fit: a cheap check before the payload is sent again.
-- Request: num_bytes.   Reply: Space: 1 or 0, last wake, groups, bytes in use
local capacity = redis.call('HMGET', SETTINGS, 'capacity_groups', 'capacity_bytes', 'on_full')
local held = redis.call('HMGET', STATS, 'bytes', 'bytes_consumed', 'bytes_quarantined')
local num_groups = redis.call('ZCARD', READY) + redis.call('ZCARD', LEASED)
local used = finite(held[1], 0) - finite(held[2], 0) - finite(held[3], 0)
local max_groups, max_bytes = finite(capacity[1], math.huge), finite(capacity[2], math.huge)
local has_room = num_groups + 1 <= max_groups and used + request.num_bytes <= max_bytes
if not has_room and capacity[3] == 'drop_stalest' then
  has_room = fits_beside_leased(request.num_bytes, max_groups, max_bytes)
end
return {has_room and 1 or 0, last_wake('room'), num_groups, used}
