-- Renews the credits of a worker's running groups.
-- ARGV: ms, group ids...   Reply: how many of the groups are running.
-- @include lib/running
local deadline, renewed, total = whole(now_ms() + tonumber(ARGV[1])), {}, 0
local running = redis.call('ZMSCORE', RUNNING, unpack(ARGV, 2))
for i = 2, #ARGV do
  if running[i - 1] then
    renewed[2 * total + 1], renewed[2 * total + 2] = deadline, ARGV[i]
    total = total + 1
  end
end
if total > 0 then call_many('ZADD', CREDITS, renewed) end
return total
