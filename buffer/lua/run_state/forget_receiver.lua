-- Removes a receiver and its staged version.
-- ARGV: receiver.   Reply: 1 if it was known, 0 if not.
redis.call('HDEL', key('staged'), ARGV[1])
return redis.call('HDEL', key('receivers'), ARGV[1])
