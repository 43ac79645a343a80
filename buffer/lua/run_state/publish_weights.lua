-- Allows engines to take a version, which a receiver holds whole. The version only grows.
-- ARGV: version.   Reply: the newest one.
local newest = finite(redis.call('HGET', key('weights'), 'published'))
if newest and newest >= tonumber(ARGV[1]) then return newest end
redis.call('HSET', key('weights'), 'published', ARGV[1], 'published_ms', whole(now_ms()))
return tonumber(ARGV[1])
