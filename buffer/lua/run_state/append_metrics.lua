-- Appends a record to the run's bounded metrics stream, once however often the request is sent.
-- ARGV: token, kind, record as JSON, longest that the stream may get.   Reply: the entry's id.
local sent = key('once:' .. ARGV[1])
local id = redis.call('GET', sent)
if id then return id end
id = redis.call('XADD', key('metrics'), 'MAXLEN', '~', ARGV[4], '*', 'kind', ARGV[2], 'record', ARGV[3])
redis.call('SET', sent, id, 'EX', '300')
return id
