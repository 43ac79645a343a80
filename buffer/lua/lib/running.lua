-- Groups that are being generated.

local RUNNING = PREFIX .. 'running'
local CREDITS = PREFIX .. 'credits'
local PROMPTS = PREFIX .. 'prompts'

-- Removes groups from the running ones; returns how many were running. With on_stale=wait a lease may
-- be waiting for one of them, here or at another shard.
local function leave_running(ids)
  local num_running = redis.call('ZREM', RUNNING, unpack(ids))
  if num_running > 0 then
    redis.call('ZREM', CREDITS, unpack(ids))
    redis.call('HDEL', PROMPTS, unpack(ids))
  end
  if on_stale == 'wait' and wanted ~= 0 then wake('batch') end
  return num_running
end
