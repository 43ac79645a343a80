-- A receiver holds a whole version. One that was forgotten meanwhile stays so.
-- ARGV: receiver, version.   Reply: 1 if noted, 0 if there is no such receiver.
if redis.call('HEXISTS', key('receivers'), ARGV[1]) == 0 then return 0 end
redis.call('HSET', key('staged'), ARGV[1], ARGV[2])
return 1
