-- Records a receiver's URL; at a new URL it has staged nothing yet.
-- ARGV: receiver, URL.   Reply: 1
if redis.call('HGET', key('receivers'), ARGV[1]) ~= ARGV[2] then
  redis.call('HSET', key('receivers'), ARGV[1], ARGV[2])
  redis.call('HDEL', key('staged'), ARGV[1])
end
return 1
