-- Releases the lock to form a batch.
-- Request: token.   Reply: 1 if it was held with this token, else 0.
if redis.call('GET', key('forming')) ~= request.token then return 0 end
redis.call('DEL', key('forming'))
wake('forming') -- a stream of its own: a rank that found no batch must not wake the others
return 1
