-- Appends a record to the run's metrics stream; repeated calls with the same token append once.
-- ARGV: token, kind, record as JSON, maximum length of the stream.   Reply: the entry's id.
local sent = key('once:' .. ARGV[1])
local id = redis.call('GET', sent)
if id then return id end
id = redis.call('XADD', key('metrics'), 'MAXLEN', '~', ARGV[4], '*', 'kind', ARGV[2], 'record', ARGV[3])
redis.call('SET', sent, id, 'EX', '300')
return id
