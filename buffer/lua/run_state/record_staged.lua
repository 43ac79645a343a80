-- Records that a receiver holds a whole version, unless it was forgotten meanwhile.
-- Request: receiver, version.   Reply: 1 if recorded, 0 if there is no such receiver.
if redis.call('HEXISTS', key('receivers'), request.receiver) == 0 then return 0 end
redis.call('HSET', key('staged'), request.receiver, request.version)
return 1
