-- The events of one group in one part of the audit stream.
-- Request: group_id, first (entry to read from), bound (number of entries to scan).
-- An entry is about one or several groups, with spaces between their ids.
-- Reply: EventsPart: next entry to read from or '', {{entry id, {name, value...}}, ...}
local limit = bound_of(request.bound)
local entries = redis.call('XRANGE', key('events'), request.first, '+', 'COUNT', limit)
local found, wanted_id = {}, ' ' .. request.group_id .. ' '
for _, entry in ipairs(entries) do
  if string.find(' ' .. entry[2][2] .. ' ', wanted_id, 1, true) then
    entry[2][2] = request.group_id
    found[#found + 1] = entry
  end
end
local is_more = #entries == limit
return {is_more and '(' .. entries[#entries][1] or '', found}
