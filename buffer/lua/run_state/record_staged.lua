-- Records that a receiver holds a whole version, unless it was forgotten meanwhile.
-- ARGV: receiver, version.   Reply: 1 if recorded, 0 if there is no such receiver.
if redis.call('HEXISTS', key('receivers'), ARGV[1]) == 0 then return 0 end
redis.call('HSET', key('staged'), ARGV[1], ARGV[2])
return 1
