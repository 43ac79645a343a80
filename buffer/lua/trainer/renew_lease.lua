-- Extends a lease. ARGV: lease token, lease in ms, group ids...   Reply: how many are still held.
-- @include lib/group
local deadlines, total = {}, 0
local deadline = whole(now_ms() + tonumber(ARGV[2]))
for i = 3, #ARGV do
  if is_held(ARGV[i], ARGV[1]) then
    deadlines[2 * total + 1], deadlines[2 * total + 2] = deadline, ARGV[i]
    total = total + 1
  end
end
if total > 0 then call_many('ZADD', LEASED, deadlines) end
return total
