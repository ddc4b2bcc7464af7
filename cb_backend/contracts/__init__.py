"""What passes between rooms, as plain data: settings, requests, the step, messages, errors. The ground floor."""
