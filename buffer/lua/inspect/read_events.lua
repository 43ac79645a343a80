-- The events of one group in one part of the audit stream.
-- ARGV: group id, entry to read from, number of entries to scan.
-- An entry is about one or several groups, with spaces between their ids.
-- Reply: {next entry to read from or '', {entry id, {name, value...}, ...}}
local limit = bound_of(ARGV[3])
local entries = redis.call('XRANGE', key('events'), ARGV[2], '+', 'COUNT', limit)
local found, wanted_id = {}, ' ' .. ARGV[1] .. ' '
for _, entry in ipairs(entries) do
  if string.find(' ' .. entry[2][2] .. ' ', wanted_id, 1, true) then
    entry[2][2] = ARGV[1]
    found[#found + 1] = entry[1]
    found[#found + 1] = entry[2]
  end
end
local is_more = #entries == limit
return {is_more and '(' .. entries[#entries][1] or '', found}
