-- Removes a receiver and its staged version.
-- Request: receiver.   Reply: 1 if it was known, 0 if not.
redis.call('HDEL', key('staged'), request.receiver)
return redis.call('HDEL', key('receivers'), request.receiver)
