-- Extends a lease. Request: lease_token, lease_ms, group_ids.   Reply: how many are still leased.
local deadlines, total = {}, 0
local deadline = whole(now_ms() + request.lease_ms)
for _, id in ipairs(request.group_ids) do
  if is_held(id, request.lease_token) then
    deadlines[2 * total + 1], deadlines[2 * total + 2] = deadline, id
    total = total + 1
  end
end
if total > 0 then call_many('ZADD', LEASED, deadlines) end
return total
