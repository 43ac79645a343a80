-- @include lib/audit
-- @include lib/poison
-- @include lib/prompts
-- @include lib/running
-- @include lib/tombstones

-- The worker that ran these groups is gone. Their prompts run again, but only once for this reason; the
-- groups themselves end, also if they are pushed after all.
local function lose_running(ids, reason)
  local prompts, lost = redis.call('HMGET', PROMPTS, unpack(ids)), {}
  leave_running(ids)
  audit(ids, 'abandoned', 'r', reason)
  count('abandoned:' .. reason, #ids)
  for i, id in ipairs(ids) do
    local prompt = prompts[i] and read_prompt(prompts[i])
    if prompt then
      lost[#lost + 1] = id
      prompt.reruns = prompt.reruns + 1
      if prompt.reruns > 1 then quarantine_prompt(id, prompt, 'worker_died', prompt.reruns)
      else rerun(id, write_prompt(prompt)) end
    end
  end
  leave_tombstones(lost, 'abandoned')
  wake('room')
end
