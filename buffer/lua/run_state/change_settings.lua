-- Changes settings of a running job. A lower max_staleness applies from the next sweep or lease.
-- Request: values, expected (both by name).   Reply: 1; 0 if a setting is not as expected
for name, value in pairs(request.expected) do
  local held = redis.call('HGET', SETTINGS, name)
  -- A setting that is not held has not been changed. If it already has the new value, the reply to an
  -- earlier call was lost.
  if held and held ~= value and held ~= request.values[name] then
    return 0
  end
end
for name, value in pairs(request.values) do
  if name == 'max_staleness' then
    local before = finite(redis.call('HGET', SETTINGS, name), 0)
    local largest = finite(redis.call('HGET', STATS, 'max_staleness_largest'), 0)
    redis.call('HSET', STATS, 'max_staleness_largest', whole(math.max(before, largest, tonumber(value))))
  end
  redis.call('HSET', SETTINGS, name, value)
end
wake('settings')
wake('room')
wake('batch') -- a lease may be waiting for a group that would have become too old
return 1
