-- Which groups a lease still holds in this shard.
-- Request: lease_token, group_ids.
-- Reply: StillLeased: ids, number consumed by it, {{id, {version...}}, ...}
return {held_by(request.lease_token, request.group_ids)}
