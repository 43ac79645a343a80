-- Compares what an engine holds at a version with what the first engine held that was read there.
-- Request: version, engine, digest.   Reply: that engine if its digest is another one, else ''.
local weights, version = key('weights'), request.version
local newest = finite(redis.call('HGET', weights, 'read_version'))
if not newest or newest < version then
  redis.call('HSET', weights, 'read_version', version, 'read_by', request.engine, 'digest',
    request.digest)
elseif newest == version and redis.call('HGET', weights, 'digest') ~= request.digest then
  return redis.call('HGET', weights, 'read_by') or ''
end
return ''
