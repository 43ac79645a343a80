-- Which groups a lease still holds in this shard.
-- Request: lease_token, group_ids.
-- Reply: StillLeased: ids, number consumed by it, deadline ms, {{id, {version...}}, ...}
local held, num_consumed, renumbered = held_by(request.lease_token, request.group_ids)
return {held, num_consumed, held[1] and deadline_of(held[1]) or 0, renumbered}
