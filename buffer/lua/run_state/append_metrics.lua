-- Appends a record to the run's metrics stream; repeated calls with the same token append once.
-- Request: token, kind, record (JSON), length (of the stream at most).   Reply: the entry's id.
local sent = key('once:' .. request.token)
local id = redis.call('GET', sent)
if id then return id end
id = redis.call('XADD', key('metrics'), 'MAXLEN', '~', request.length, '*', 'kind', request.kind,
  'record', request.record)
redis.call('SET', sent, id, 'EX', '300')
return id
