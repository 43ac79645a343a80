-- A receiver can be reached at a URL; a new one under an old name has staged nothing yet.
-- ARGV: receiver, URL.   Reply: 1
if redis.call('HGET', key('receivers'), ARGV[1]) ~= ARGV[2] then
  redis.call('HSET', key('receivers'), ARGV[1], ARGV[2])
  redis.call('HDEL', key('staged'), ARGV[1])
end
return 1
