-- A receiver is gone, and what it had staged with it.
-- ARGV: receiver.   Reply: 1 if it was known, 0 if not.
redis.call('HDEL', key('staged'), ARGV[1])
return redis.call('HDEL', key('receivers'), ARGV[1])
