-- Image of runs that name none, on instances that run only containers; NULL: the setting of the server.
ALTER TABLE projects ADD COLUMN default_image TEXT;
