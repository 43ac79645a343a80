-- Marks a version available: a receiver has it whole. The newest one only grows.
-- Request: version.   Reply: the newest one.
local newest = finite(redis.call('HGET', key('weights'), 'available'))
if newest and newest >= request.version then return newest end
redis.call('HSET', key('weights'), 'available', request.version, 'available_ms', whole(now_ms()))
return request.version
