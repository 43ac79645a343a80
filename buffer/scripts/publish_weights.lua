-- A version is whole at a receiver: from now on engines may take it. The number only grows.
-- ARGV: version.   Reply: the newest one.
local newest = redis.call('HGET', key('weights'), 'published')
if newest and tonumber(newest) >= tonumber(ARGV[1]) then return tonumber(newest) end
redis.call('HSET', key('weights'), 'published', ARGV[1], 'published_ms', whole(now_ms()))
return tonumber(ARGV[1])
