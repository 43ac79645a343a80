-- Keeps tokens of a running group with its prompt.
-- ARGV: group id, oldest version that sampled a token of the group ('' if unknown), then for each part
--       its name and its tokens. They are small beside a group's payload, so Lua may copy them.
-- Reply: 1 | 0 if the group is not running (nothing is kept).
-- @include lib/kept
-- @include lib/lineage
-- @include lib/running
local text = redis.call('ZSCORE', RUNNING, ARGV[1]) and redis.call('HGET', PROMPTS, ARGV[1])
local name = text and name_of(text)
if not name then return 0 end
if ARGV[2] ~= '' then
  -- Tokens that were kept may be older than the group's admission: on_stale=wait must wait for them.
  local oldest = renumber(finite(ARGV[2], 0), read_gaps(), 1)
  if oldest then redis.call('ZADD', RUNNING, 'XX', 'LT', whole(oldest), ARGV[1]) end
end
if #ARGV > 2 then
  redis.call('HSET', KEPT, name, '1')
  redis.call('HSET', kept_key(name), unpack(ARGV, 3))
end
return 1
