-- leased -> ready (or quarantined), for the groups that this lease still holds.
-- ARGV: lease token, reason, group ids...   Reply: number of groups returned.
-- @include lib/group
-- @include lib/return
local lease_token, total = ARGV[1], 0
for i = 3, #ARGV do
  if is_held(ARGV[i], lease_token) then
    return_leased(ARGV[i], 'nacked', 'r', ARGV[2])
    total = total + 1
  end
end
count('nacked:' .. ARGV[2], total)
return total
