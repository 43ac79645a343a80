-- Gives the lock to form a batch back.
-- ARGV: token.   Reply: 1 if it was held with this token, else 0.
if redis.call('GET', key('forming')) ~= ARGV[1] then return 0 end
redis.call('DEL', key('forming'))
wake('forming') -- a stream of its own: who looked in vain must not be woken by the next who looks
return 1
