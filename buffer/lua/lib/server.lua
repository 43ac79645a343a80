-- Which server this is, and when the run was last seen to move to another one.

-- A server that was killed may have lost its last moments, and in them the push of a group. So a credit
-- that was not renewed since shows no worker's death. Returns the deadline up to which a credit that
-- lasts `credit_ms` was last renewed before.
local function lost_with_server(credit_ms)
  local server = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
  local known = redis.call('HMGET', SETTINGS, 'server', 'server_ms')
  if known[1] == server then return finite(known[2], -LARGEST) + finite(credit_ms, 0) end
  local seen_ms = known[1] and now_ms() or -LARGEST
  redis.call('HSET', SETTINGS, 'server', server, 'server_ms', whole(seen_ms))
  return seen_ms + finite(credit_ms, 0)
end
