-- Lets an engine pause for a commit if fewer than `limit` others do. It holds its place until it leaves
-- or the place expires, so that a dead engine does not block the others; entering again renews it.
-- ARGV: engine, limit, ms that the place is held.
-- Reply: {'entered'} | {'wait', last wake id, ms until the next place expires}
local gate = key('commit_gate')
local over = redis.call('ZRANGE', gate, '-inf', whole(now_ms()), 'BYSCORE', 'LIMIT', '0', MAX_ITEMS)
if over[1] then redis.call('ZREM', gate, unpack(over)) end
if not redis.call('ZSCORE', gate, ARGV[1]) and redis.call('ZCARD', gate) >= finite(ARGV[2], 1) then
  local first = redis.call('ZRANGE', gate, '0', '0', 'WITHSCORES')
  return {'wait', last_wake('gate'), math.max(1, finite(first[2], LARGEST) - now_ms() + 1)}
end
redis.call('ZADD', gate, whole(now_ms() + ARGV[3]), ARGV[1])
return {'entered'}
