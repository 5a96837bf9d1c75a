"""What people look at afterwards: figures and the page."""
