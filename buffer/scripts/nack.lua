-- Gives leased groups back: leased -> ready, for those that this owner still holds.
-- ARGV: owner token, reason, group ids...   Reply: how many went back.
local owner, total = ARGV[1], 0
for i = 3, #ARGV do
  if is_held(ARGV[i], owner) then
    return_to_ready(ARGV[i])
    total = total + 1
  end
end
if total > 0 then
  count('nacked:' .. ARGV[2], total)
  wake_batch()
end
return total
