-- Renews the credits of a worker's running groups.
-- Request: group_ids, credit_ms.   Reply: how many of the groups are running.
local deadline, renewed, total = whole(now_ms() + request.credit_ms), {}, 0
local running = redis.call('ZMSCORE', RUNNING, unpack(request.group_ids))
for i, id in ipairs(request.group_ids) do
  if running[i] then
    renewed[2 * total + 1], renewed[2 * total + 2] = deadline, id
    total = total + 1
  end
end
if total > 0 then call_many('ZADD', CREDITS, renewed) end
return total
