-- Records a receiver's URL; at a new URL it has staged nothing yet.
-- Request: receiver, url.   Reply: 1
if redis.call('HGET', key('receivers'), request.receiver) ~= request.url then
  redis.call('HSET', key('receivers'), request.receiver, request.url)
  redis.call('HDEL', key('staged'), request.receiver)
end
return 1
