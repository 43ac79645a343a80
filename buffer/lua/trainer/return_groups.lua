-- leased -> ready (or quarantined), for the groups that this lease still holds.
-- Request: lease_token, reason, group_ids.   Reply: number of groups returned.
local total = 0
for _, id in ipairs(request.group_ids) do
  if is_held(id, request.lease_token) then
    return_leased(id, 'nacked', 'r', request.reason)
    total = total + 1
  end
end
count('nacked:' .. request.reason, total)
return total
