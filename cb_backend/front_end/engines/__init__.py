"""The front end's side of the engines: started, watched, chosen, spoken to."""
