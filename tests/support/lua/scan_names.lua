-- One part of the names that anything is kept under, for check_groups.
-- Request: source ('keys' or a set), cursor, bound (about how many to look at).   Reply: {cursor, {group ids}, {steps}}
local groups, steps, reply = {}, {}, nil
if request.source == 'keys' then
  reply = redis.call('SCAN', request.cursor, 'MATCH', key('*'), 'COUNT', bound_of(request.bound))
  local start = #key('') + 1
  for _, name in ipairs(reply[2]) do
    local kind, rest = string.match(string.sub(name, start), '^(%a+):(.+)$')
    if kind == 'group' then groups[#groups + 1] = rest
    elseif kind == 'lease' then steps[#steps + 1] = rest
    elseif kind == 'payload' then
      -- 'payload:<id>:<chunk>' belongs to <id>, unless that is itself the id of a group.
      local whole_id = redis.call('EXISTS', group_key(rest)) == 0 and string.match(rest, '^(.+):%d+$')
      if whole_id and redis.pcall('HEXISTS', group_key(whole_id), 'chunks') == 1 then rest = whole_id end
      groups[#groups + 1] = rest
    end
  end
elseif request.source == 'prompts' then
  reply = redis.call('HSCAN', PROMPTS, request.cursor, 'COUNT', bound_of(request.bound))
  for i = 1, #reply[2], 2 do groups[#groups + 1] = reply[2][i] end
else
  reply = redis.call('ZSCAN', key(request.source), request.cursor, 'COUNT', bound_of(request.bound))
  local found = request.source == 'batches' and steps or groups
  for i = 1, #reply[2], 2 do found[#found + 1] = reply[2][i] end
end
return {reply[1], groups, steps}
