-- Which groups a lease still holds in this shard.
-- ARGV: lease token, group ids...
-- Reply: {{ids held}, number consumed by it, deadline ms, {id, versions...}}
-- @include lib/held
local held, num_consumed, moved = held_by(ARGV[1], {unpack(ARGV, 2)})
local deadline = held[1] and deadline_of(held[1]) or '0'
return {held, num_consumed, deadline, moved}
