-- Which server this is, and when the run last moved to another one.

-- A killed server may have lost the push of a group in its last moments. So a credit that was not
-- renewed since does not prove that its worker died. Returns the latest deadline of credits of
-- `credit_ms` that were last renewed before the move.
local function lost_with_server(credit_ms)
  local server = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
  local known = redis.call('HMGET', SETTINGS, 'server', 'server_ms')
  if known[1] == server then return finite(known[2], -LARGEST) + finite(credit_ms, 0) end
  local seen_ms = known[1] and now_ms() or -LARGEST
  redis.call('HSET', SETTINGS, 'server', server, 'server_ms', whole(seen_ms))
  return seen_ms + finite(credit_ms, 0)
end
