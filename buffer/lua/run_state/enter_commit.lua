-- Lets an engine pause for a commit if fewer than `limit` others do. It holds its place until it leaves
-- or the place expires, so that a dead engine does not block the others; entering again renews it.
-- Request: engine, limit, held_ms (how long the place is held).
-- Reply: Place: 1 | 0, last wake, ms until the next place expires
local gate = key('commit_gate')
local over = redis.call('ZRANGE', gate, '-inf', whole(now_ms()), 'BYSCORE', 'LIMIT', '0', MAX_ITEMS)
if over[1] then redis.call('ZREM', gate, unpack(over)) end
if not redis.call('ZSCORE', gate, request.engine) and redis.call('ZCARD', gate) >= request.limit then
  local first = redis.call('ZRANGE', gate, '0', '0', 'WITHSCORES')
  return {0, last_wake('gate'), math.max(1, finite(first[2], LARGEST) - now_ms() + 1)}
end
redis.call('ZADD', gate, whole(now_ms() + request.held_ms), request.engine)
return {1}
