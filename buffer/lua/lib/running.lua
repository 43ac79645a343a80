-- Groups that are being generated.

local RUNNING = PREFIX .. 'running'
local CREDITS = PREFIX .. 'credits'
local PROMPTS = PREFIX .. 'prompts'

-- Removes groups from the running ones; returns how many were running. With on_stale=wait a lease may
-- be waiting for one of them, here or at another shard. What is kept of their tokens goes too, unless
-- their prompts run again with it (`keeps`).
local function leave_running(ids, keeps)
  local num_running = redis.call('ZREM', RUNNING, unpack(ids))
  if num_running > 0 then
    local prompts = not keeps and redis.call('EXISTS', KEPT) == 1 and
      redis.call('HMGET', PROMPTS, unpack(ids))
    redis.call('ZREM', CREDITS, unpack(ids))
    redis.call('HDEL', PROMPTS, unpack(ids))
    if prompts then forget_kept(prompts) end
  end
  if on_stale == 'wait' and wanted ~= 0 then wake('batch') end
  return num_running
end

-- Records the prompt of a running group, and the position of its worker in its tasks.
local function note_prompt(id, text, worker, position)
  local tasks, prompt = key('tasks'), read_prompt(text)
  redis.call('HSET', PROMPTS, id, text)
  if finite(redis.call('HGET', tasks, worker), -1) < position then
    redis.call('HSET', tasks, worker, position)
  end
  audit({id}, 'begun', 'p', prompt.task .. ':' .. prompt.index)
end
