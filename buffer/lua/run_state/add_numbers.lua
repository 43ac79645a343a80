-- Adds to numbers in one of the run's hashes, all at once; repeated calls with the same token add once.
-- Request: token, name (of the hash), amounts (by field).   Reply: 1 if added now, 0 if added before.
if not redis.call('SET', key('once:' .. request.token), '1', 'NX', 'EX', '300') then return 0 end
local name = key(request.name)
for field, amount in pairs(request.amounts) do
  local before = redis.call('HGET', name, field)
  if before and not finite(before) then redis.call('HDEL', name, field) end
  redis.call('HINCRBYFLOAT', name, field, amount)
end
return 1
